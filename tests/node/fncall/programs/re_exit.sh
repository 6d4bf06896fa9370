# verdict: RE
echo 6
exit 7
