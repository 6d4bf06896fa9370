// verdict: RE
// limits: memory_mb=384
public class Main {
    public static void main(String[] args) {
        System.out.println(6);
        throw new IllegalStateException();
    }
}
