#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Replace yacht with eagle in draft.txt.
is draft.txt 'cloud
eagle
beach olive' && points=$((points + 6))
# Delete list.txt.
[ ! -e list.txt ] && is index.txt 'giant' && points=$((points + 6))
# Save line 3 of quote.txt to notes.txt.
is notes.txt 'paint' && points=$((points + 6))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 18))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
