# verdict: RE
echo 6
kill -TERM $$
