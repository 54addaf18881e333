#!/bin/sh
# Makes sure that a program is here, from Debian's packages when root. usage: install_system.sh PROGRAM PACKAGE
set -eu
if command -v "$1" >/dev/null 2>&1; then
  echo "$2: here"
elif [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$2" >/dev/null
  echo "$2: installed"
else
  echo "$2: not here; install it as root with your package manager" >&2
  exit 1
fi
