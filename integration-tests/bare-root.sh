#!/usr/bin/env bash
# The fresh-machine test (`cargo xtask bare-root`): a Debian root that holds only Rust, Java, Maven and a C compiler, a
# clone of the repository in it, and there the README's second command. Needs root on Debian, debootstrap and git.
#
#   bare-root.sh [command …]    runs the command instead of `cargo xtask test`, with the clone as current directory
#
# Everything happens in mount and process namespaces of its own: however this ends, no process and no mount is left.
# What the machine is told about mirrors, certificates and registries is passed on; nothing of it is written down here.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
repository=$(dirname "$here")

[ "$(id -u)" = 0 ] || { echo "bare-root: has to run as root" >&2; exit 1; }
command -v debootstrap >/dev/null || { echo "bare-root: please install debootstrap" >&2; exit 1; }

if [ "${ONCEBOX_BARE_ROOT:-}" = "" ]; then
    ONCEBOX_BARE_ROOT=$(mktemp -d /var/tmp/oncebox-bare-XXXXXX)
    export ONCEBOX_BARE_ROOT
    # this shell outlives the namespaces and removes the directory; nothing is mounted in it any more by then
    trap 'rm -rf --one-file-system "$ONCEBOX_BARE_ROOT"' EXIT
    trap 'exit 130' INT TERM HUP
    status=0
    unshare --mount --pid --fork --kill-child -- "$here/bare-root.sh" "$@" || status=$?
    exit "$status"
fi

root=$ONCEBOX_BARE_ROOT/root
say() { echo "bare-root: $* ($SECONDS s)"; }

say "debootstrap"
"$here/debian-root.sh" "$root"
cp /etc/resolv.conf /etc/hosts "$root/etc/"
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/dev/shm" 2>/dev/null || { mkdir -p "$root/dev/shm" && mount -t tmpfs tmpfs "$root/dev/shm"; }

inside() { env -i HOME=/root TERM=dumb LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive \
    PATH=/opt/rust/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    "${passed[@]+"${passed[@]}"}" chroot "$root" "$@"; }

say "Java, Maven and a C compiler"
passed=()
inside apt-get -qq update
inside apt-get -qq install -y --no-install-recommends \
    ca-certificates gcc libc6-dev openjdk-17-jre-headless maven >"$ONCEBOX_BARE_ROOT/apt.log" 2>&1 ||
    { tail -20 "$ONCEBOX_BARE_ROOT/apt.log" >&2; exit 1; }

say "Rust"
mkdir -p "$root/opt/rust" "$root/root/.cargo" "$root/root/.m2"
mount --bind "$(rustc --print sysroot)" "$root/opt/rust"
mount -o remount,bind,ro "$root/opt/rust"

# certificates and registry settings of this machine: files, then environment
cp -rL /etc/ssl/certs/. "$root/etc/ssl/certs/" 2>/dev/null || true
cargo_home=${CARGO_HOME:-$HOME/.cargo}
for file in config config.toml credentials.toml; do
    [ ! -e "$cargo_home/$file" ] || cp "$cargo_home/$file" "$root/root/.cargo/"
done
[ ! -e "$HOME/.m2/settings.xml" ] || cp "$HOME/.m2/settings.xml" "$root/root/.m2/"
[ ! -e /etc/maven/settings.xml ] || cp /etc/maven/settings.xml "$root/etc/maven/"
while IFS= read -r -d '' variable; do
    case $variable in
    CARGO_REGISTRIES_* | CARGO_REGISTRY_* | CARGO_SOURCE_* | CARGO_HTTP_* | CARGO_NET_*) passed+=("$variable") ;;
    http_proxy=* | https_proxy=* | no_proxy=* | HTTP_PROXY=* | HTTPS_PROXY=* | NO_PROXY=*) passed+=("$variable") ;;
    SSL_CERT_FILE=* | SSL_CERT_DIR=* | MAVEN_OPTS=* | MAVEN_ARGS=*) passed+=("$variable") ;;
    esac
done </proc/self/environ

say "clone"
git clone --quiet --no-hardlinks "$repository" "$root/oncebox"

[ $# -gt 0 ] || set -- cargo xtask test
say "$*"
status=0
inside sh -c 'cd /oncebox && exec "$@"' sh "$@" || status=$?
say "ended with status $status"
exit "$status"
