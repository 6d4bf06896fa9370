// verdict: AC
// limits: memory_mb=384
const words = require("fs").readFileSync(0, "utf8").split(/\s+/).map(Number);
console.log(words.slice(1, 1 + words[0]).reduce((a, b) => a + b, 0));
