// verdict: RE
#include <iostream>
#include <vector>
int main() {
    std::vector<int> values(3);
    std::cout << values.at(3) << '\n';
}
