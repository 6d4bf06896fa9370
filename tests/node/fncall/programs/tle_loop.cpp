// verdict: TLE
#include <atomic>
int main() {
    std::atomic<unsigned long> n{0};
    while (true) n++;
}
