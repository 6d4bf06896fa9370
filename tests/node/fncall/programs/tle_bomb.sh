# verdict: TLE
bomb() { bomb | bomb & }
bomb 2> /dev/null
exec sleep 60
