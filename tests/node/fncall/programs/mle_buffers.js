// verdict: MLE
// limits: memory_mb=192
const held = [];
for (;;) held.push(Buffer.alloc(1 << 20, 1));
