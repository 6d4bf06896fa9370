// verdict: WA
// limits: memory_mb=384
const words = require("fs").readFileSync(0, "utf8").trim().split(/\s+/);
console.log(words.slice(1).reduce((a, b) => a + b));
