// verdict: CE
#include <string>
int main() {
    int n = std::string("6");
    return n;
}
