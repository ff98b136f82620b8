#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Make the folder work.
[ -d work ] && points=$((points + 6))
# Move list.txt into work.
is work/list.txt 'sugar' && points=$((points + 3))
is work/list.txt 'sugar' && [ ! -e list.txt ] && points=$((points + 3))
# Save the last line of names.txt to letter.txt.
is letter.txt 'night' && points=$((points + 6))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 18))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
