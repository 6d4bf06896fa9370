# verdict: AC
for place in / /bin /etc /usr /var /opt /root /run /home /sys /proc /dev; do
    if touch "$place/made" 2> /dev/null; then echo "$place can be written"; fi
done
for place in . /tmp /var/tmp /dev/shm; do touch "$place/made" || exit 1; done
echo 6
