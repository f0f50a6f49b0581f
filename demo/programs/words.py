"""An interpreter at work: counts words and word pairs of a text, and sorts them."""

import sys

text = open(sys.argv[1], encoding="utf-8", errors="replace").read().split()
words, pairs = {}, {}
before = ""
for word in text:
    words[word] = words.get(word, 0) + 1
    pairs[before, word] = pairs.get((before, word), 0) + 1
    before = word
common = sorted(pairs.items(), key=lambda item: (-item[1], item[0]))[:5]
print(len(words), len(pairs), common)
