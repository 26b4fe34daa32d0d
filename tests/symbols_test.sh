#!/bin/sh
# What the shared library exports: mla_* and mla::, nothing else.
#   symbols_test.sh <nm> <library> <mla.h>
set -eu
nm=$1 library=$2 header=$3
exported=$("$nm" -D --defined-only --extern-only -C "$library" | sed 's/^[0-9a-f]* *[A-Za-z] //; s/@.*//')
foreign=$(printf '%s\n' "$exported" | grep -vE '^mla_[a-z_]+$|^mla::|^(typeinfo|typeinfo name|vtable) for mla::Error$|^MLA_[0-9]+$' || true)
if [ -n "$foreign" ]; then
  printf 'symbols_test: exported, but neither mla_* nor mla:::\n%s\n' "$foreign" >&2
  exit 1
fi
# Kernels and stages are private.
internal=$(printf '%s\n' "$exported" | grep -E '^mla::(cpu|cuda|numeric|testkit|io)::|validate_|schedule' || true)
if [ -n "$internal" ]; then
  printf 'symbols_test: internal, but exported:\n%s\n' "$internal" >&2
  exit 1
fi
# Everything that mla.h declares is there.
for name in $(sed -n 's/^MLA_C_API.*[ *]\(mla_[a-z_]*\)(.*/\1/p' "$header"); do
  if ! printf '%s\n' "$exported" | grep -qx "$name"; then
    echo "symbols_test: $name is declared in mla.h and not exported" >&2
    exit 1
  fi
done
for name in 'mla::plan(' 'mla::run(' 'mla::workspace_size(' 'mla::splits(' 'mla::backends(' 'mla::merge('; do
  printf '%s\n' "$exported" | grep -qF "$name" || { echo "symbols_test: $name is not exported" >&2; exit 1; }
done
