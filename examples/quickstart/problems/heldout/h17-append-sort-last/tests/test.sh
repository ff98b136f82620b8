#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Append onion to guide.txt.
[ "$(tail -n 1 guide.txt 2> /dev/null)" = onion ] && points=$((points + 3))
is guide.txt 'green
tulip
onion' && points=$((points + 3))
# Sort memo.txt into poem.txt.
is poem.txt 'green
robot
tulip fruit' && points=$((points + 6))
# Save the last line of text.txt to essay.txt.
is essay.txt 'laser' && points=$((points + 6))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 18))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
