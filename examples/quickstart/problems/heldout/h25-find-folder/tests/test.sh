#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Find the line with magic in paper.txt for poem.txt.
is poem.txt 'magic robot' && points=$((points + 6))
# Make the folder safe.
[ -d safe ] && points=$((points + 6))
# Move text.txt into safe.
is safe/text.txt 'salad' && points=$((points + 3))
is safe/text.txt 'salad' && [ ! -e text.txt ] && points=$((points + 3))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 18))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
