#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Sort diary.txt into notes.txt.
is notes.txt 'beach
cloud
mango' && points=$((points + 6))
# Save the last line of recipe.txt to plan.txt.
is plan.txt 'sugar' && points=$((points + 6))
# Copy score.txt to names.txt.
is names.txt 'voice
ivory' && points=$((points + 3))
is names.txt 'voice
ivory' && is score.txt 'voice
ivory' && points=$((points + 3))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 18))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
