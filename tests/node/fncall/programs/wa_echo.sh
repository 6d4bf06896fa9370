# verdict: WA
cat
