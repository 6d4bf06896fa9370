// verdict: MLE
#include <vector>
int main() {
    std::vector<std::vector<char>> held;
    while (true) held.emplace_back(1 << 20, 'x');
}
