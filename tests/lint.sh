#!/bin/bash
# lint.sh [CHECK...] - rules about the tree that no compiler keeps. Without arguments: all checks.
#
#   tests/lint.sh --list      names of the checks, one a line (tidy only with LINT_DEEP=1)
#   tests/lint.sh layers      one of them
#
# One line a finding: where, what, what to do instead. Then "ok CHECK" or "FAIL CHECK", or "skip CHECK: why".
# "note" lines do not fail. Exit status 1 when a check failed. BUILD, SAN, MUTANTS as in the Makefile.
# shellcheck disable=SC2013,SC2317,SC2086,SC2048,SC2016,SC2046
set -u
cd "$(dirname "$0")/.." || exit 2

checks="layers imports cores length words exports headers clang asserts documents"
[ "${LINT_DEEP:-0}" = 1 ] && checks="$checks tidy"
BUILD=${BUILD:-build}
SAN=${SAN:-}
jobs=$(nproc)
scratch=$(mktemp -d) || exit 2
trap 'rm -rf "$scratch"' EXIT

folders="base wire net storage coord server worker"
flags="-std=c17 -D_GNU_SOURCE -Wall -Wextra -Werror -Wstrict-prototypes -Wmissing-prototypes -Wvla"
flags="$flags -Wno-missing-field-initializers -I. -Ibase -Iworker"

# tree PATTERN...: paths of sources, also those not committed yet.
tree() {
    local names=()
    for p in "$@"; do names+=(-o -name "$p"); done
    find . -name '.?*' -prune -o -name 'build*' -type d -prune -o -type f \( "${names[@]:1}" \) -print | sed 's,^\./,,' | sort
}

# objects FOLDER...: builds and prints the object files of folders; one line and status 1 when they do not compile.
objects() {
    local f c list=()
    for f in "$@"; do
        for c in "$f"/*.c; do list+=("$BUILD/${c%.c}.o"); done
    done
    if ! make -s -k -j"$jobs" BUILD="$BUILD" SAN="$SAN" "${list[@]}" >"$scratch/make" 2>&1; then
        grep -m1 -E 'error|\*\*\*' "$scratch/make" | sed 's/^/does not compile: /' >&2
        return 1
    fi
    printf '%s\n' "${list[@]}"
}

check_layers() {
    local sources
    mapfile -t sources < <(tree '*.c' '*.h')
    awk -f tests/lint/layers.awk "${sources[@]}"
}

# A library is called only from files that are named after it.
check_imports() {
    objects $folders >"$scratch/objects" || return 1
    xargs nm -A -u <"$scratch/objects" | awk -v build="$BUILD/" '
        BEGIN {
            may["uv_"] = "_uv[.]o$"; may["mdb_"] = "(_lmdb|coord/coord_local|coord/local_[a-z]+)[.]o$"
            may["curl_"] = "(_curl|_etcd)[.]o$"; may["ibv_"] = may["rdma_"] = "_verbs[.]o$"
            may["cJSON_"] = "(wire/doc_[a-z]+|coord/etcd_[a-z]+|server/(host_)?status[a-z_]*)[.]o$"
        }
        { file = $1; sub(/:$/, "", file); sub(/:.*/, "", file); symbol = $NF }
        match(symbol, /^[a-zA-Z]+_/) {
            prefix = substr(symbol, 1, RLENGTH)
            if (prefix in may && file !~ may[prefix]) {
                sub(build, "", file); sub(/[.]o$/, ".c", file)
                print file ": calls " symbol "(); move that to a file whose name ends like " may[prefix]
                bad = 1
            }
        }
        END { exit bad }'
}

# Cores are sans-IO: their objects import other cores, base without clock, wire, and pure functions of libc.
check_cores() {
    local cores allowed
    objects base wire coord server worker >"$scratch/objects" || return 1
    cores=$(grep -E '/(server/(shard_|ctl_|optim)|coord/view_|worker/client_)[a-z_]*\.o$|_core\.o$' "$scratch/objects" | sort -u)
    [ -n "$cores" ] || { echo "no object of a core found: correct the pattern here"; return 1; }
    allowed="memcpy memmove memset memcmp memchr bcmp strlen strnlen strcmp strncmp strchr strrchr strspn strcspn
             snprintf vsnprintf strtod strtol strtoll strtoul strtoull qsort bsearch sqrt sqrtf pow fabs floor ceil rint nearbyint
             coord_event_done __ctype_b_loc __cpu_model __cpu_indicator_init __stack_chk_fail _GLOBAL_OFFSET_TABLE_"
    {
        printf '%s\n' $allowed
        nm --defined-only $(grep -E '/(base|wire)/' "$scratch/objects" | grep -v '/base/clock\.o') $cores |
            awk 'NF == 3 && $2 ~ /[TDBR]/ { print $3 }'
    } | sort -u >"$scratch/allowed"
    nm -A -u $cores | awk -v build="$BUILD/" -v allowed="$scratch/allowed" '
        BEGIN { while ((getline line < allowed) > 0) ok[line] = 1 }
        $NF !~ /^__(asan|ubsan|tsan|sanitizer|lsan|odr_asan)/ && !($NF in ok) {
            file = $1; sub(/:.*/, "", file); sub(build, "", file); sub(/[.]o$/, ".c", file)
            print file ": a core must not use " $NF "; ask the host for it with an effect, or let the event carry it"
            bad = 1
        }
        END { exit bad }'
}

check_length() {
    local sources
    mapfile -t sources < <(tree '*.c' '*.h')
    awk -f tests/lint/length.awk "${sources[@]}"
}

check_words() {
    local bad=0
    # Each word is written with a bracket so that this file does not find itself.
    tree '*.c' '*.h' '*.sh' '*.py' '*.md' '*.awk' '*.map' Makefile run >"$scratch/texts"
    if xargs grep -nHwE '[T]ODO|[F]IXME|[X]XX|[H]ACK' <"$scratch/texts"; then
        echo "finish it, or describe what is missing in the documents"
        bad=1
    fi
    if xargs grep -nHwE '[R]ULES(\.md)?|[D]ESIGN(\.md)?' <"$scratch/texts"; then
        echo "no such document here: docs/ARCHITECTURE.md, docs/PROTOCOL.md"
        bad=1
    fi
    if xargs grep -nHE "(^|[][\"'\`[:space:]=:(,<>|])/([h]ome|[w]ork|[r]oot|[m]nt)(/|[\"'\`[:space:]]|\$)" <"$scratch/texts"; then
        echo "no absolute paths of one machine: use a path in the tree, mktemp or an argument"
        bad=1
    fi
    if grep -E '^(tests|chaos)/' "$scratch/texts" | xargs grep -nHE '(^|[^a-z_.])u?[s]leep *\(|time\.[s]leep\(([1-9]|0\.[2-9])' ||
        grep -E '^(tests|chaos)/.*(\.sh|/run)$' "$scratch/texts" | xargs -r grep -nHE '(^|[ ;])[s]leep +[1-9]'; then
        echo "do not sleep for luck: wait for the condition with a deadline (short pauses between looks: nanosleep)"
        bad=1
    fi
    return $bad
}

check_exports() {
    local lib=$BUILD/libkeepstep.so other
    if ! make -s -j"$jobs" BUILD="$BUILD" SAN="$SAN" "$lib" >"$scratch/make" 2>&1; then
        tail -n 2 "$scratch/make"
        echo "$lib does not link"
        return 1
    fi
    nm -D --defined-only "$lib" | awk '$2 != "A" { print $3 }' | sort >"$scratch/exported"
    other=$(grep -v '^ks_' "$scratch/exported")
    [ -z "$other" ] || echo "$other" | sed 's/$/: exported, but not ks_*; correct worker\/keepstep.map/'
    grep -oE '\bks_[a-z_]+\(' worker/keepstep.h | tr -d '(' | sort -u >"$scratch/declared"
    comm -13 "$scratch/declared" "$scratch/exported" | grep '^ks_' | sed 's/$/: exported, not in keepstep.h; declare or rename it/' >"$scratch/extra"
    sed -n 's/^KS_API.*\<\(ks_[a-z_]*\)(.*/\1/p' worker/keepstep.h | sort -u | comm -23 - "$scratch/exported" |
        sed 's/$/: declared in keepstep.h and not in the library; write it or take it out/' >>"$scratch/extra"
    cat "$scratch/extra"
    [ -z "$other" ] && [ ! -s "$scratch/extra" ]
}

check_headers() {
    local h guard first bad=0
    for h in $(tree '*.h'); do
        # A template: included once for each element type.
        [ "$h" = server/optim_steps.h ] && continue
        guard=$(grep -m1 '^#' "$h" | sed -n 's/^#ifndef \([A-Z0-9_]*_H\)$/\1/p')
        if [ -z "$guard" ] || ! grep -q "^#define $guard\$" "$h"; then
            echo "$h: no include guard; put #ifndef FOLDER_FILE_H and #define before everything else"
            bad=1
        fi
        # cmocka.h wants these before it, and says so.
        first=""
        case $h in tests/*) first="#include <stdarg.h>\n#include <stddef.h>\n#include <stdint.h>\n#include <setjmp.h>\n" ;; esac
        printf "%b#include \"%s\"\n" "$first" "$h" >"$scratch/$(echo "$h" | tr / %).c"
    done
    printf '%s\n' "$scratch"/*.h.c | xargs -P "$jobs" -I{} sh -c '
        gcc '"$flags"' -Wno-unused-function -fsyntax-only "$1" >"$1.out" 2>&1 || { grep -m1 error "$1.out"; exit 1; }' sh {} || {
        echo "a header compiles alone: include in it what it uses"
        bad=1
    }
    return $bad
}

check_clang() {
    command -v clang >/dev/null || { skip="clang is not installed"; return 0; }
    tree '*.c' | xargs -P "$jobs" -n 8 clang $flags -DKEEPSTEP_VERSION='"lint"' -Wno-format-truncation \
        -Wno-unknown-warning-option -fno-caret-diagnostics -fsyntax-only || return 1
}

check_asserts() {
    local bad=0 f helpers
    helpers=$(tree '*.h' '*.c' | grep -E '^tests/' | grep -vE '/(test|fuzz)_[a-z0-9_]*\.c$')
    for f in $(tree 'test_*.c' | grep '^tests/'); do
        awk -f tests/lint/asserts.awk $helpers "$f" || bad=1
    done
    for f in $(tree '*.py' '*.sh' | grep -E '^(tests|chaos)/.*(test_|check_)'); do
        grep -qE 'assert|exit 1|sys\.exit|fail' "$f" || { echo "$f: asserts nothing"; bad=1; }
    done
    return $bad
}

# Documents name files and functions that exist; the program in README.md compiles.
check_documents() {
    local bad=0 doc name file function docs
    docs=$(tree '*.md')
    for doc in $docs; do
        # `folder/file.c:function`
        for name in $(grep -oE '`[a-z][a-z0-9_/.]*/[a-z0-9_]+\.[a-z0-9]+(:[a-z0-9_]+)?`' "$doc" | tr -d '`' | sort -u); do
            file=${name%%:*}
            function=${name#"$file"}
            if [ ! -e "$file" ]; then
                case $file in build*) continue ;; esac
                echo "$doc: there is no $file; name the one that has it now"
                bad=1
            elif [ -n "$function" ] && ! grep -qE "(^|[ *])${function#:}\(" "$file"; then
                echo "$doc: $file has no ${function#:}(); name the one that does it now"
                bad=1
            fi
        done
        for name in $(grep -oE '\]\([A-Za-z][^):#]*\)' "$doc" | sed 's/^](//; s/)$//' | sort -u); do
            [ -e "$(dirname "$doc")/$name" ] || { echo "$doc: the link to $name is dead"; bad=1; }
        done
    done
    sed -n '/^```c$/,/^```$/p' README.md | grep -v '^```' >"$scratch/readme.c"
    gcc $flags -fsyntax-only "$scratch/readme.c" || { echo "README.md: its program does not compile"; bad=1; }
    return $bad
}

check_tidy() {
    command -v clang-tidy >/dev/null || { skip="clang-tidy is not installed"; return 0; }
    tree '*.c' | grep -v '^bench/' | xargs -P "$jobs" -n 4 sh -c '
        clang-tidy --quiet "$@" -- '"$flags"' -DKEEPSTEP_VERSION='"'\"lint\"'"' 2>/dev/null' sh >"$scratch/tidy"
    # The analyzer follows paths without knowing the contracts between functions: read its lines, they do not fail.
    grep -E '(warning|error): ' "$scratch/tidy" | sed "s,^$PWD/,,; s,^\./,," | sort -u >"$scratch/findings"
    grep -F '[clang-analyzer-' "$scratch/findings" | sed 's/^/note /'
    ! grep -vF '[clang-analyzer-' "$scratch/findings"
}

[ "${1:-}" = --list ] && { printf '%s\n' $checks; exit 0; }
failed=0
for c in ${*:-$checks}; do
    declare -F "check_$c" >/dev/null || { echo "no check \"$c\"; there are: $checks" >&2; exit 2; }
    skip=""
    if "check_$c"; then
        [ -n "$skip" ] && echo "skip $c: $skip" || echo "ok $c"
    else
        echo "FAIL $c"
        failed=1
    fi
done
exit $failed
