// verdict: TLE
// limits: memory_mb=384
for (;;) {}
