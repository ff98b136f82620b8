#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Replace night with paint in list.txt.
is list.txt 'urban zebra
north
paint' && points=$((points + 6))
# Let a sub-agent do this: Append light to items.txt.
[ "$(tail -n 1 items.txt 2> /dev/null)" = light ] && points=$((points + 3))
is items.txt 'jelly
uncle
light' && points=$((points + 3))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 12))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
