#!/bin/sh
# Makes sure that the Debian packages libmla builds with are there: installs the missing ones as root,
# else prints the line to type.
set -eu

packages="g++ cmake ninja-build git pkg-config libhwy-dev libopenblas-dev libcli11-dev nlohmann-json3-dev
libgtest-dev clang libclang-rt-14-dev libopenmpi-dev openmpi-bin"

missing=""
for package in $packages; do
  if ! dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed'; then
    missing="$missing $package"
  fi
done
[ -z "$missing" ] && exit 0

if [ "$(id -u)" -ne 0 ]; then
  echo "These Debian packages are missing. Install them with:" >&2
  echo "  sudo apt-get install --no-install-recommends$missing" >&2
  exit 1
fi
echo "installing:$missing"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086  # the list is split into words on purpose
apt-get install -y -qq --no-install-recommends $missing
