-- A database engine at work: makes two tables, an index, joins and groups.
CREATE TABLE customer(id INTEGER PRIMARY KEY, region INTEGER, name TEXT);
CREATE TABLE purchase(id INTEGER PRIMARY KEY, customer INTEGER, amount INTEGER);
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 6000)
INSERT INTO customer SELECT i, (i * 7919) % 40, 'customer ' || ((i * 104729) % 99991) FROM n;
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 40000)
INSERT INTO purchase SELECT i, 1 + (i * 15485863) % 6000, (i * 32452843) % 1000 FROM n;
CREATE INDEX by_customer ON purchase(customer);
SELECT region, count(*), sum(amount) FROM customer JOIN purchase ON purchase.customer = customer.id GROUP BY region
ORDER BY 3 DESC LIMIT 3;
SELECT name, (SELECT sum(amount) FROM purchase WHERE customer = customer.id) AS spent FROM customer ORDER BY spent DESC, name
LIMIT 3;
