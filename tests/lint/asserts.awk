# asserts.awk - every cmocka test asserts something, itself or in a function that it calls.
# Arguments: the files that help tests, then one test program.

FNR == 1 { file = FILENAME }
/^[a-zA-Z_].*\(/ && !body { head = $0; sub(/\(.*/, "", head); sub(/.*[ *]/, "", head) }
/^#define [A-Za-z_]+\(/ && !body {
    head = $2
    sub(/\(.*/, "", head)
    macro = 1
}
macro { text[head] = text[head] $0 "\n"; if ($0 !~ /\\$/) macro = 0 }
/^\{$/ { body = 1 }
body { text[head] = text[head] $0 "\n" }
/^\}$/ { body = 0 }
/cmocka_unit_test/ {
    line = $0
    while (match(line, /cmocka_unit_test[a-z_]*\([a-zA-Z_0-9]+/)) {
        test = substr(line, RSTART, RLENGTH)
        sub(/.*\(/, "", test)
        tests[test] = file ":" FNR
        ntests++
        line = substr(line, RSTART + RLENGTH)
    }
}

END {
    for (f in text)
        if (text[f] ~ /assert_|fail_msg|fail\(|CHECK\(/)
            asserts[f] = 1
    do {
        more = 0
        for (f in text) {
            if (f in asserts)
                continue
            n = split(text[f], word, /[^a-zA-Z_0-9]+/)
            for (i = 1; i <= n; i++)
                if (word[i] != f && word[i] in asserts) {
                    asserts[f] = more = 1
                    break
                }
        }
    } while (more)
    for (t in tests)
        if (t in text && !(t in asserts)) {
            print tests[t] ": " t "() asserts nothing; say what must hold"
            bad = 1
        }
    if (!ntests && !("main" in asserts)) {
        print file ": no test in it; register them with cmocka_unit_test"
        bad = 1
    }
    exit bad
}
