#!/bin/sh
# What a host needs from Debian, installed when missing. Needs root if it installs; says what it does on stderr; safe to repeat.
#
# Everything comes from the machine's own apt configuration: on Debian 12 QEMU is taken from the backports suite of the mirror that
# apt already uses, because QEMU 7.2 hangs in early boot on the microvm machine (docs/architecture.md).
set -eu
say() { echo "provision: $*" >&2; }

NEEDED="qemu-system-x86 qemu-utils mmdebstrap iptables iproute2 e2fsprogs cpio busybox-static kmod xz-utils zstd util-linux
        debian-archive-keyring gcc libc6-dev libxtables-dev pkg-config ca-certificates python3 python3-venv python3-dev"

. /etc/os-release
[ "${ID:-}" = debian ] || { say "this is ${PRETTY_NAME:-an unknown system}; boxfleet hosts run Debian 12 or 13"; exit 1; }

installed() { [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

missing=""
for package in $NEEDED; do installed "$package" || missing="$missing $package"; done

qemu_major() { qemu-system-x86_64 --version 2>/dev/null | sed -n 's/^QEMU emulator version \([0-9]*\).*/\1/p'; }
old_qemu() { major=$(qemu_major); [ -z "$major" ] || [ "$major" -lt 9 ]; }

[ -n "$missing" ] || ! old_qemu || missing=" qemu-system-x86"
[ -n "$missing" ] || { say "everything is installed"; exit 0; }
[ "$(id -u)" = 0 ] || { say "must run as root to install:$missing"; exit 1; }

export DEBIAN_FRONTEND=noninteractive
suite=""
if [ "$VERSION_ID" = 12 ]; then
    suite=bookworm-backports
    if ! grep -rqs "$suite" /etc/apt/sources.list /etc/apt/sources.list.d; then
        # The first Debian archive of apt's own configuration, whichever of the two formats it is written in.
        mirror=$(apt-get indextargets --format '$(SITE) $(RELEASE) $(CREATED_BY)' 2>/dev/null | awk '$2=="bookworm" && $3=="Packages" {print $1; exit}')
        [ -n "$mirror" ] || { say "found no Debian archive for bookworm in apt's configuration"; exit 1; }
        printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg\n' \
            "$mirror" "$suite" > /etc/apt/sources.list.d/boxfleet-backports.sources
        say "added $suite of the mirror in use (/etc/apt/sources.list.d/boxfleet-backports.sources)"
    fi
fi
say "apt-get update"
apt-get update -qq
say "installing:$missing"
others=""
for package in $missing; do case $package in qemu-*) ;; *) others="$others $package";; esac; done
[ -z "$others" ] || apt-get install -y -qq --no-install-recommends $others >&2
case "$missing" in *qemu*)
    apt-get install -y -qq --no-install-recommends ${suite:+-t $suite} qemu-system-x86 qemu-utils >&2;;
esac
old_qemu && { say "QEMU $(qemu_major) is older than 9, which boxfleet needs"; exit 1; }
say "done"
