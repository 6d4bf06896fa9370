# Can a Docker daemon run here? One sentence, and on failure a second line with the remedy; status 0: yes, 1: no.
# It tries what the daemon will do, undoes it, and needs no program but those of a minimal Debian and of Docker itself:
# where there is no `ip`, bridges are not looked at. Runs as root in a sandbox; $1 is the daemon's data root.
root=${1:-/var/lib/docker}
PATH=$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
kernel="install another guest kernel: \`opendsec kernel install\`"
work=

undo() {
    [ -z "$work" ] || { umount "$work/merged" 2>/dev/null; rm -rf "$work"; }
    iptables -w 10 -t nat -F ods-check >/dev/null 2>&1
    iptables -w 10 -t nat -X ods-check >/dev/null 2>&1
    ip link del ods-check0 >/dev/null 2>&1
    ip link del ods-check1 >/dev/null 2>&1
    rmdir /sys/fs/cgroup/ods-check 2>/dev/null
}

trap undo EXIT
trap 'exit 1' HUP INT TERM

lacks() {
    printf '%s\n%s\n' "no Docker daemon can run here: $1" "$2"
    exit 1
}

read -r _ _ ids < /proc/self/uid_map
[ "$ids" = 4294967295 ] || lacks "the sandbox shares its host's kernel" "start it with \`--backend microvm\`"
[ "$(id -u)" = 0 ] || lacks "this is not root" "check as root"
for program in dockerd containerd runc iptables; do
    command -v "$program" >/dev/null || lacks "the image has no program $program" "install docker.io and iptables in it"
done
for space in mnt pid net ipc uts cgroup; do
    [ -e "/proc/self/ns/$space" ] || lacks "the guest kernel has no $space namespaces" "$kernel"
done

undo # names that a check which was killed has left
mkdir -p "$root"
work=$(mktemp -d "$root/.ods-check-XXXXXX") || lacks "nothing can be written at $root" "make room there"
mkdir "$work/lower" "$work/upper" "$work/work" "$work/merged"
grep -qw overlay /proc/filesystems || lacks "the guest kernel has no overlay file system" "$kernel"
mount -t overlay ods-check -o "lowerdir=$work/lower,upperdir=$work/upper,workdir=$work/work" "$work/merged" \
    2>/dev/null || lacks "$root lies on the sandbox's own overlay, and overlays cannot be stacked" \
    "give the image the label \`opendsec.data-disk=$root\`"

[ -e /sys/fs/cgroup/cgroup.controllers ] || lacks "cgroup version 2 is not mounted" "$kernel"
for controller in cpu cpuset io memory pids; do
    grep -qw "$controller" /sys/fs/cgroup/cgroup.controllers ||
        lacks "the guest kernel has no cgroup controller $controller" "$kernel"
done
mkdir /sys/fs/cgroup/ods-check 2>/dev/null || lacks "no control groups can be made" "mount cgroup2 writable"

words=$(iptables -w 10 -t nat -N ods-check 2>&1) || lacks "iptables: $(echo $words)" "$kernel"
rule() {
    name=$1
    shift
    words=$(iptables -w 10 -t nat -A ods-check "$@" 2>&1) ||
        lacks "the guest kernel has no iptables $name: $(echo $words)" "$kernel"
}
rule "match addrtype" -m addrtype --dst-type LOCAL -j RETURN
rule "match conntrack" -m conntrack --ctstate RELATED -j RETURN
rule "match tcp" -p tcp -m tcp --dport 1 -j RETURN
rule "target DNAT" -p tcp -m tcp --dport 1 -j DNAT --to-destination 127.0.0.1:1
rule "target MASQUERADE" -j MASQUERADE
[ -w /proc/sys/net/ipv4/ip_forward ] || lacks "net.ipv4.ip_forward cannot be set" "run it in a microVM"

looked="bridges were not looked at: the image has no program ip"
if command -v ip >/dev/null; then
    ip link add ods-check0 type bridge 2>/dev/null || lacks "the guest kernel has no bridges" "$kernel"
    ip link add ods-check1 type veth peer name ods-check2 2>/dev/null || lacks "the guest kernel has no veth" "$kernel"
    looked="overlay2, bridges and published ports work"
fi
echo "a Docker daemon can run here, its data at $root; $looked"
