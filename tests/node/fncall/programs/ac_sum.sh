# verdict: AC
read -r n
sum=0
read -r -a values
for value in "${values[@]:0:n}"; do sum=$((sum + value)); done
echo "$sum" > /dev/stdout
echo "done" > /dev/stderr
