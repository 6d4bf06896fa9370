// verdict: WA
#include <iostream>
int main() {
    long n, sum = 0, x;
    std::cin >> n;
    for (long i = 0; i + 1 < n; i++) std::cin >> x, sum += x;
    std::cout << sum << '\n';
}
