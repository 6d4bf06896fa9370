// verdict: TLE
// limits: memory_mb=384
public class Main {
    public static void main(String[] args) {
        for (long i = 0; ; i++) if (i == -1) System.out.println(i);
    }
}
