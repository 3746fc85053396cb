//! The tables of a small shop, in the same words for both databases.

pub(crate) const TABLES: &str = "
    CREATE TABLE customer (name TEXT PRIMARY KEY);
    INSERT INTO customer VALUES ('ann'), ('bob');
    CREATE TABLE orders (
        id BIGINT UNIQUE,
        order_no TEXT NOT NULL UNIQUE,
        customer TEXT NOT NULL DEFAULT 'ann' REFERENCES customer (name),
        amount BIGINT CHECK (amount > 0),
        status TEXT NOT NULL DEFAULT 'pending',
        seen BIGINT,
        note TEXT
    );
    CREATE TABLE coupon (customer TEXT, campaign BIGINT, UNIQUE (customer, campaign));
    CREATE TABLE log (line TEXT, sequence TEXT);
    CREATE TABLE account (id BIGINT PRIMARY KEY, balance INTEGER NOT NULL, version INTEGER NOT NULL);
    INSERT INTO account VALUES (1, 100, 7);
    CREATE TABLE stock (sku TEXT PRIMARY KEY, quantity BIGINT);
    INSERT INTO stock VALUES ('apple', 10), ('full', 9223372036854775807), ('unknown', NULL);
    CREATE TABLE shelf (warehouse INTEGER, sku TEXT, quantity INTEGER, PRIMARY KEY (warehouse, sku));
    INSERT INTO shelf VALUES (1, 'apple', 3), (2, 'apple', 4);
";
