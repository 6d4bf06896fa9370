// verdict: RE
// limits: memory_mb=384
console.log(6);
throw new Error("after the answer");
