#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
echo chair > letter.txt
sort list.txt > sketch.txt
echo flame >> plan.txt
