#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Save the last line of notes.txt to quote.txt.
is quote.txt 'paint' && points=$((points + 6))
# Make the folder archive.
[ -d archive ] && points=$((points + 6))
# Move names.txt into archive.
is archive/names.txt 'night' && points=$((points + 3))
is archive/names.txt 'night' && [ ! -e names.txt ] && points=$((points + 3))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 18))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
