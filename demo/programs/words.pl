# An interpreter at work: counts the words of a text with regular expressions.
my %count;
while (<>) { $count{lc $1}++ while /(\w+)/g; }
my @common = sort { $count{$b} <=> $count{$a} || $a cmp $b } keys %count;
print scalar(@common), " $common[0]\n";
