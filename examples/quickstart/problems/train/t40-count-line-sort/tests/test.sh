#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Count the lines of draft.txt into menu.txt.
is menu.txt '6' && points=$((points + 6))
# Save line 2 of letter.txt to index.txt.
is index.txt 'paint' && points=$((points + 6))
# Sort story.txt into items.txt.
is items.txt 'earth koala
north metal
zebra' && points=$((points + 6))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 18))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
