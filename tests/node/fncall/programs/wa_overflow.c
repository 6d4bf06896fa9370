// verdict: WA
#include <stdio.h>
int main(void) {
    signed char sum = 100;
    sum = (signed char)(sum + 100);
    printf("%d\n", sum);
    return 0;
}
