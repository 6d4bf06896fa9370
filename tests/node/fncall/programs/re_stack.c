// verdict: RE
#include <string.h>
static int deeper(volatile char *above) {
    volatile char here[65536];
    memset((char *)here, above[0], sizeof here);
    return deeper(here) + here[1];
}
int main(void) {
    char first[1] = {1};
    return deeper(first);
}
