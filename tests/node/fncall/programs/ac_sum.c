// verdict: AC
#include <stdio.h>
int main(void) {
    long n, sum = 0, x;
    if (scanf("%ld", &n) != 1) return 1;
    while (n-- > 0 && scanf("%ld", &x) == 1) sum += x;
    printf("%ld\n", sum);
    return 0;
}
