// verdict: CE
int main(void) { return 0
