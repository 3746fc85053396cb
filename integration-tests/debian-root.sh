#!/bin/sh
# Makes a minimal Debian root in the directory $1, with the packages $2… besides: the base of the test images and of
# bare-root.sh. Release and mirror are those of this machine's own apt sources; needs root and debootstrap.
set -eu

target=$1
shift

release=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
# deb822 (`URIs: …`) or one-line (`deb [options] … release …`) sources, whichever names the release first
mirror=$(
    cat /etc/apt/sources.list.d/*.sources /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null | awk '
        $1 == "URIs:" { print $2; exit }
        $1 == "deb" { for (i = 2; i <= NF; i++) if ($i ~ /^[a-z+]+:\/\//) { print $i; exit } }'
)
if [ -z "$release" ] || [ -z "$mirror" ]; then
    echo "debian-root.sh: this machine's release or apt mirror is unknown: not a Debian?" >&2
    exit 1
fi
include=$(echo "$*" | tr ' ' ,)
debootstrap --variant=minbase ${include:+--include="$include"} "$release" "$target" "$mirror" >"$target.log" 2>&1 || {
    tail -20 "$target.log" >&2
    exit 1
}
rm -f "$target.log" "$target"/var/cache/apt/archives/*.deb

# what this machine needs to reach its mirrors, the new root needs too
echo "deb $mirror $release main" >"$target/etc/apt/sources.list"
for part in /etc/apt/auth.conf /etc/apt/auth.conf.d $(grep -ls Acquire /etc/apt/apt.conf /etc/apt/apt.conf.d/*); do
    [ ! -e "$part" ] || cp -a "$part" "$target$(dirname "$part")/"
done
mkdir -p "$target/etc/ssl/certs"
cp -rL /etc/ssl/certs/. "$target/etc/ssl/certs/" 2>/dev/null || true
