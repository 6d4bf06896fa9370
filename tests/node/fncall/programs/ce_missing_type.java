// verdict: CE
public class Main {
    public static void main(String[] args) {
        Missing.print(6);
    }
}
