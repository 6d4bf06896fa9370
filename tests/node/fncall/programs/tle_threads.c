// verdict: TLE
// The processor time of all threads counts.
#include <pthread.h>
static void *busy(void *unused) {
    for (;;) {}
    return unused;
}
int main(void) {
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) pthread_create(&threads[i], 0, busy, 0);
    pthread_join(threads[0], 0);
    return 0;
}
