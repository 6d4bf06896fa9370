// verdict: AC
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int main(void) {
    if (setuid(0) == 0 || setgid(0) == 0 || getuid() != 65534 || geteuid() != 65534) return 1;
    if (system("su -c true </dev/null >/dev/null 2>&1") == 0) return 2;
    printf("6\n");
    return 0;
}
