# The first process of a host of the tests' Slurm, in namespaces of its own: host.sh NAME FOLDER [GROUP]. Only
# slurm_cluster.py starts it. When it is killed, the kernel ends every process of the host with it, and the mounts and
# links go away.
set -eu
mount -t proc proc /proc
hostname "$1"
# `torchrun --standalone` waits for ever where the host's own name does not resolve.
mount --bind "$2/hosts" /etc/hosts
# The plugin's job step removes every variable SLURM_*, SLURM_CONF too: Slurm's commands must find their settings here.
mount --bind "$2/etc" /etc/slurm
# Its root of each hierarchy of control groups, which Slurm fills with groups of its own.
for group in /sys/fs/cgroup/*/vlmflow-tests/"${3:-none}"; do
    [ ! -d "$group" ] || mount --bind "$group" "${group%/vlmflow-tests/*}"
done
ip link set lo up
touch "$2/run/$1.ready"
sleep infinity & # a shell that waits takes the ends of processes whose parents have gone
wait
