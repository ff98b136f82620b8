#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Write metal to report.txt.
is report.txt 'metal' && points=$((points + 6))
# Rename story.txt to sketch.txt.
is sketch.txt 'night
wheel' && points=$((points + 3))
is sketch.txt 'night
wheel' && [ ! -e story.txt ] && points=$((points + 3))
# Save the last line of letter.txt to diary.txt.
is diary.txt 'ivory' && points=$((points + 6))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 18))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
