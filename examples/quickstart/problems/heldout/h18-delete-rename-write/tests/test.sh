#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Delete text.txt.
[ ! -e text.txt ] && is essay.txt 'fruit' && points=$((points + 6))
# Rename poem.txt to memo.txt.
is memo.txt 'fruit
bacon nurse' && points=$((points + 3))
is memo.txt 'fruit
bacon nurse' && [ ! -e poem.txt ] && points=$((points + 3))
# Write tulip to guide.txt.
is guide.txt 'tulip' && points=$((points + 6))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 18))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
