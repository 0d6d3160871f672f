# layers.awk - which folder may include which, and which file may see which library. Arguments: all *.c and *.h.

BEGIN {
    # A folder that is not named here (chaos, tests, bench) may include anything.
    may["base"] = " base "
    may["wire"] = " base wire "
    may["net"] = " base wire net "
    may["storage"] = " base storage "
    may["coord"] = " base wire coord "
    may["server"] = " base wire net storage coord server "
    may["worker"] = " base wire net coord worker "
    may["worker/examples"] = " worker/keepstep.h "

    library["uv.h"] = "_uv[.]c$"
    library["lmdb.h"] = "(_lmdb|/coord_local|/local_[a-z]+)[.]c$"
    library["curl/curl.h"] = "(_curl|_etcd)[.]c$"
    library["infiniband/verbs.h"] = library["rdma/rdma_cma.h"] = "_verbs[.]c$"
    library["cjson/cJSON.h"] = "(wire/doc_[a-z]+|coord/etcd_[a-z]+|server/(host_)?status[a-z_]*)[.]c$"
    library["openssl/hmac.h"] = library["openssl/evp.h"] = library["openssl/crypto.h"] = "net/auth[.]c$"

    # These see struct host, which embeds handles of libuv, and call none of its functions (check "imports").
    sees["server/host_start.c uv.h"] = sees["server/host_status.c uv.h"] = 1

    for (i = 1; i < ARGC; i++)
        exists[ARGV[i]] = 1
}

function folder_of(file,    f) {
    if (file ~ /^worker\/examples\//)
        return "worker/examples"
    f = file
    sub(/\/.*/, "", f)
    return f
}

function resolve(from, name,    dir) {
    dir = from
    sub(/[^\/]*$/, "", dir)
    if ((dir name) in exists)
        return dir name
    if (name in exists)
        return name
    if (("base/" name) in exists)
        return "base/" name
    if (("worker/" name) in exists)
        return "worker/" name
    return ""
}

/^#[ \t]*include[ \t]*"/ {
    split($0, part, "\"")
    to = resolve(FILENAME, part[2])
    from = folder_of(FILENAME)
    if (to == "")
        report(FILENAME ":" FNR ": no file \"" part[2] "\"; write the path from the top of the tree")
    else {
        edge[FILENAME, ++edges[FILENAME]] = to
        if (from in may && index(may[from], " " folder_of(to) " ") == 0 && index(may[from], " " to " ") == 0)
            report(FILENAME ":" FNR ": " from " must not include " to "; it may include:" may[from] \
                   "(move what is shared down a layer)")
    }
}

/^#[ \t]*include[ \t]*</ {
    split($0, part, /[<>]/)
    if (part[2] in library)
        direct[FILENAME, part[2]] = 1
}

function report(text) {
    print text
    bad = 1
}

# How `file` comes to see a library, as a chain of files; "" when it does not.
function chain(file, lib,    i, rest) {
    if ((file, lib) in direct)
        return file
    if ((file, lib) in seen)
        return ""
    seen[file, lib] = 1
    for (i = 1; i <= edges[file]; i++) {
        rest = chain(edge[file, i], lib)
        if (rest != "")
            return file " -> " rest
    }
    return ""
}

END {
    for (file in exists) {
        if (file !~ /[.]c$/ || file ~ /^(tests|chaos|bench)\//)
            continue
        for (lib in library) {
            if (file ~ library[lib] || (file " " lib) in sees)
                continue
            delete seen
            how = chain(file, lib)
            if (how != "")
                report(file ": sees <" lib "> (" how "); only files like " library[lib] \
                       " may: hide it behind a header without it")
        }
    }
    exit bad
}
