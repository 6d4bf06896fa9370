// verdict: CE
#include "/call/expected"
int main(void) { return 0; }
