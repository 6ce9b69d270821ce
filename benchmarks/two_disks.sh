#!/usr/bin/env bash
# Striping over two devices on a machine with one: two loop devices, throttled to MB_PER_S each by a control group.
#
#   sudo benchmarks/two_disks.sh [MB_PER_S [FLAG ...]]       150 MB/s; flags of benchmarks/ssd.py; PYTHON=.venv/bin/python
#
# The real device must be more than twice as fast as one of them. Exit code: that of benchmarks/ssd.py.
set -euo pipefail
rate=$((${1:-150} * 1000000))
shift || true
folder=$(mktemp -d)
python=${PYTHON:-.venv/bin/python}
devices=()
group=

clean() {
  for name in 0 1; do umount "$folder/disk$name" 2>/dev/null || true; done
  for device in "${devices[@]}"; do losetup --detach "$device" || true; done
  [ -z "$group" ] || rmdir "$group" || true
  rm -rf "$folder"
}
trap clean EXIT

for name in 0 1; do
  truncate -s 3G "$folder/image$name"
  devices+=("$(losetup --direct-io=on --find --show "$folder/image$name")")
  mkfs.ext4 -q "${devices[$name]}"
  mkdir "$folder/disk$name"
  mount "${devices[$name]}" "$folder/disk$name"
done
if [ -d /sys/fs/cgroup/blkio ]; then
  root=/sys/fs/cgroup/blkio
else
  root=/sys/fs/cgroup
  echo +io > $root/cgroup.subtree_control
fi
mkdir "$root/two-disks-$$"
group=$root/two-disks-$$
for device in "${devices[@]}"; do
  number=$(lsblk --noheadings --nodeps --output MAJ:MIN "$device" | tr -d ' ')
  if [ "$root" = /sys/fs/cgroup ]; then
    echo "$number rbps=$rate wbps=$rate" > "$group/io.max"
  else
    for way in read write; do echo "$number $rate" > "$group/blkio.throttle.${way}_bps_device"; done
  fi
done
bash -c 'echo $$ > "$0/cgroup.procs" && exec "$@"' "$group" \
  "$python" benchmarks/ssd.py "$folder/disk0" --stripe "$folder/disk1" --total-mib 192 --repeats 3 "$@"
