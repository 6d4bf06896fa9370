// verdict: WA
// limits: memory_mb=384
public class Main {
    public static void main(String[] args) {
        System.out.println(new java.util.Scanner(System.in).nextInt());
    }
}
