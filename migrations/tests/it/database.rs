//! A PostgreSQL database per test, created and dropped here.

use std::sync::atomic::{AtomicU32, Ordering};

use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions as _, Connection as _, Executor as _, PgConnection};

const URL: &str = "ONCEBOX_TEST_POSTGRES_URL";

/// A database of the test's own.
#[derive(Debug, Clone)]
pub(crate) struct Database {
    pub(crate) name: String,
    options: PgConnectOptions,
}

/// Runs a test in a database of its own, which is dropped afterwards, also when the test panics.
pub(crate) async fn run<F, Fut>(test: F)
where
    F: FnOnce(Database) -> Fut,
    Fut: Future<Output = ()> + Send + 'static,
{
    let Ok(url) = std::env::var(URL) else {
        println!("skipped: {URL} is not set");
        return;
    };
    let admin: PgConnectOptions = url.parse().expect("a PostgreSQL URL");
    let mut conn = admin.connect().await.expect("a PostgreSQL superuser");
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!(
        "oncebox_it_{}_{}_{:x}",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed),
        uuid::Uuid::new_v4().as_u128() as u32
    );
    execute(&mut conn, &format!("CREATE DATABASE {name}")).await;
    let options = admin.database(&name);
    let outcome = tokio::spawn(test(Database {
        name: name.clone(),
        options,
    }))
    .await;
    execute(&mut conn, &format!("DROP DATABASE {name} WITH (FORCE)")).await;
    for role in ROLES {
        execute(&mut conn, &format!("DROP ROLE IF EXISTS {name}_{role}")).await;
    }
    if let Err(error) = outcome {
        std::panic::resume_unwind(error.into_panic());
    }
}

/// The roles a test may create with [`Database::create_role`].
const ROLES: [&str; 3] = ["producer", "relay", "consumer"];
const PASSWORD: &str = "only-for-this-test";

impl Database {
    pub(crate) fn options(&self) -> PgConnectOptions {
        self.options.clone()
    }

    pub(crate) fn url(&self) -> String {
        self.options.to_url_lossy().to_string()
    }

    pub(crate) async fn connect(&self) -> PgConnection {
        self.options.connect().await.expect("the test's database")
    }

    /// Creates a login role without any right and returns its name. Dropped with the database.
    pub(crate) async fn create_role(&self, role: &str) -> String {
        assert!(ROLES.contains(&role));
        let name = format!("{}_{role}", self.name);
        let mut conn = self.connect().await;
        execute(
            &mut conn,
            &format!("CREATE ROLE {name} LOGIN PASSWORD '{PASSWORD}'"),
        )
        .await;
        conn.close().await.expect("goodbye");
        name
    }

    pub(crate) fn options_of(&self, role: &str) -> PgConnectOptions {
        self.options().username(role).password(PASSWORD)
    }
}

/// Runs SQL that must succeed.
pub(crate) async fn execute(conn: &mut PgConnection, sql: &str) {
    conn.execute(sqlx::raw_sql(AssertSqlSafe(sql.to_owned())))
        .await
        .unwrap_or_else(|error| panic!("{sql}: {error}"));
}
