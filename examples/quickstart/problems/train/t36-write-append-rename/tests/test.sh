#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Write chair to names.txt.
is names.txt 'chair' && points=$((points + 6))
# Append zebra to report.txt.
[ "$(tail -n 1 report.txt 2> /dev/null)" = zebra ] && points=$((points + 3))
is report.txt 'flame
water paint
zebra' && points=$((points + 3))
# Rename notes.txt to draft.txt.
is draft.txt 'stone
field' && points=$((points + 3))
is draft.txt 'stone
field' && [ ! -e notes.txt ] && points=$((points + 3))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 18))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
