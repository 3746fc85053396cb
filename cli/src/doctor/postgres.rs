//! The doctor's questions to PostgreSQL. Reads only.

use oncebox_migrations::{Dialect, Names};
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, PgConnection, Row};
use tokio::time::timeout;

use super::database::{
    BETWEEN_LOOKS, Findings, PATIENCE, ROWS_FOR_TOPICS, explain, explain_connect, late, schema,
};
use super::position::Mark;
use super::report::Checks;
use crate::args::Role;
use crate::config::DatabaseUrl;

const SERVER: &str = "SELECT current_setting('server_version_num')::int, current_setting('server_version'),
    pg_is_in_recovery(), current_setting('transaction_read_only')::bool, current_user::text, current_database()::text";
const DURABILITY: &str = "SELECT current_setting('synchronous_commit'), current_setting('fsync'),
    current_setting('full_page_writes')";
/// Roles and databases whose sessions commit without waiting for the disk: perhaps a producer's.
const UNSAFE_ROLES: &str = "SELECT coalesce(r.rolname, 'all roles') || ' in ' || coalesce(d.datname, 'all databases')
    FROM pg_db_role_setting s LEFT JOIN pg_roles r ON r.oid = s.setrole LEFT JOIN pg_database d ON d.oid = s.setdatabase
    WHERE EXISTS (SELECT FROM unnest(s.setconfig) c WHERE c ILIKE 'synchronous_commit=off')";
const HISTORY_IS_HIDDEN: &str =
    "SELECT coalesce(NOT has_table_privilege(to_regclass($1), 'SELECT'), false)";
const MAY_USE_SCHEMA: &str = "SELECT has_schema_privilege($1, 'USAGE')";
const MAY_TABLE: &str = "SELECT has_table_privilege($1, $2)";
const MAY_SEQUENCE: &str =
    "SELECT has_sequence_privilege(pg_get_serial_sequence($1, 'id'), 'SELECT')";

pub(super) async fn examine(url: &DatabaseUrl, names: &Names, roles: &[Role]) -> Findings {
    let mut findings = Findings::default();
    let checks = &mut findings.checks;
    let options: PgConnectOptions = match url.expose().parse() {
        Ok(options) => options,
        Err(error) => {
            explain(checks, "database", &error);
            return findings;
        }
    };
    let place = format!("{}:{}", options.get_host(), options.get_port());
    // A question that hangs must not hang the doctor, on either side of the wire.
    let options = options
        .application_name("oncebox doctor")
        .options([("statement_timeout", "4000"), ("lock_timeout", "2000")]);
    let mut conn = match timeout(PATIENCE, options.connect()).await {
        Ok(Ok(conn)) => conn,
        Ok(Err(error)) => {
            explain_connect(checks, &place, &error);
            return findings;
        }
        Err(_) => {
            late(checks, "database");
            return findings;
        }
    };
    let answered = timeout(
        2 * PATIENCE,
        ask(&mut conn, names, roles, &place, &mut findings),
    )
    .await;
    match answered {
        Ok(Ok(())) => {}
        Ok(Err(error)) => explain(&mut findings.checks, "database", &error),
        Err(_) => late(&mut findings.checks, "database"),
    }
    let _ = timeout(PATIENCE, conn.close()).await;
    findings
}

async fn ask(
    conn: &mut PgConnection,
    names: &Names,
    roles: &[Role],
    place: &str,
    findings: &mut Findings,
) -> Result<(), sqlx::Error> {
    let checks = &mut findings.checks;
    server(conn, place, checks).await?;
    durability(conn, checks).await?;
    if !usable_schema(conn, names, roles, checks).await? {
        checks.skip("rights", "no usable schema");
        checks.skip("mark", "no usable schema");
        return Ok(());
    }
    let mut readable = true;
    for role in roles {
        let missing = missing_rights(conn, names, *role).await?;
        if missing.is_empty() {
            checks.ok("rights", format!("everything that a {role} needs"));
        } else {
            readable &= *role != Role::Relay;
            checks.fail(
                "rights",
                format!(
                    "a {role} needs, and this user lacks: {}",
                    missing.join(", ")
                ),
                "as the tables' owner, run what `oncebox migrate --grants` prints",
            );
        }
    }
    if !readable || !roles.contains(&Role::Relay) {
        checks.skip("mark", "needs the rights of a relay");
        return Ok(());
    }
    let Some(first) = mark(conn, names).await? else {
        checks.fail(
            "mark",
            "the mark row is missing",
            "restore it from a backup: it is the identity of this outbox",
        );
        return Ok(());
    };
    findings.topics = topics(conn, names, first.high()).await?;
    tokio::time::sleep(BETWEEN_LOOKS).await;
    findings.mark = mark(conn, names).await?.map(|later| (first, later));
    Ok(())
}

/// A producer needs no right to read the history, and its grants give none.
async fn usable_schema(
    conn: &mut PgConnection,
    names: &Names,
    roles: &[Role],
    checks: &mut Checks,
) -> Result<bool, sqlx::Error> {
    let history = names.history(Dialect::Postgres);
    let hidden: bool = sqlx::query_scalar(HISTORY_IS_HIDDEN)
        .bind(&history)
        .fetch_one(&mut *conn)
        .await?;
    if !hidden {
        return Ok(schema(
            checks,
            oncebox_migrations::postgres::status(conn, names).await,
        ));
    }
    if roles.iter().all(|role| *role == Role::Producer) {
        checks.skip(
            "schema",
            "a producer may not read its version, and need not",
        );
    } else {
        checks.fail(
            "schema",
            format!("this user lacks SELECT on {history}"),
            "as the tables' owner, run what `oncebox migrate --grants` prints",
        );
    }
    Ok(true)
}

async fn server(
    conn: &mut PgConnection,
    place: &str,
    checks: &mut Checks,
) -> Result<(), sqlx::Error> {
    let (number, version, standby, read_only, user, database): (
        i32,
        String,
        bool,
        bool,
        String,
        String,
    ) = sqlx::query_as(SERVER).fetch_one(conn).await?;
    let what = format!("PostgreSQL {version} at {place}, database {database}, user {user}");
    if number < 140_000 {
        checks.fail("database", what, "Oncebox needs PostgreSQL 14 or newer");
    } else if standby || read_only {
        checks.fail(
            "database",
            format!("{what}: read only"),
            "connect to the primary: a relay and an inbox write",
        );
    } else {
        checks.ok("database", what);
    }
    Ok(())
}

async fn durability(conn: &mut PgConnection, checks: &mut Checks) -> Result<(), sqlx::Error> {
    let (commit, fsync, pages): (String, String, String) =
        sqlx::query_as(DURABILITY).fetch_one(&mut *conn).await?;
    let careless: Vec<String> = sqlx::query_scalar(UNSAFE_ROLES).fetch_all(conn).await?;
    let found = format!("synchronous_commit={commit}, fsync={fsync}, full_page_writes={pages}");
    if fsync == "off" || pages == "off" {
        checks.fail(
            "durability",
            found,
            "turn fsync and full_page_writes on: a crash may lose acknowledged messages (G2)",
        );
    } else if commit == "off" {
        checks.fail("durability", found, "set synchronous_commit=on: an acknowledged commit may be lost after it was published (G2)");
    } else if careless.is_empty() {
        checks.ok("durability", found);
    } else {
        checks.warn(
            "durability",
            format!("synchronous_commit=off for {}", careless.join(", ")),
            "if one of them enqueues: ALTER ROLE … RESET synchronous_commit (G2)",
        );
    }
    Ok(())
}

/// What `grants` of the migrations gives to this role and the user does not have.
async fn missing_rights(
    conn: &mut PgConnection,
    names: &Names,
    role: Role,
) -> Result<Vec<String>, sqlx::Error> {
    if !sqlx::query_scalar::<_, bool>(MAY_USE_SCHEMA)
        .bind(names.schema())
        .fetch_one(&mut *conn)
        .await?
    {
        return Ok(vec![format!("USAGE on schema {}", names.schema())]);
    }
    let d = Dialect::Postgres;
    let needed: Vec<(&str, String)> = match role {
        Role::Producer => vec![("INSERT", names.outbox(d))],
        Role::Relay => {
            let mut needed = vec![
                ("SELECT", names.outbox(d)),
                ("DELETE", names.outbox(d)),
                ("SELECT", names.mark(d)),
                ("UPDATE", names.mark(d)),
            ];
            for table in [names.parked(d), names.paused(d)] {
                let rights = ["SELECT", "INSERT", "UPDATE", "DELETE"];
                needed.extend(rights.map(|right| (right, table.clone())));
            }
            needed
        }
        Role::Consumer => {
            let mut needed = Vec::new();
            for table in [names.inbox(d), names.dead_letter(d)] {
                needed.extend(["SELECT", "INSERT", "DELETE"].map(|right| (right, table.clone())));
            }
            needed.extend(["SELECT", "INSERT", "UPDATE"].map(|right| (right, names.position(d))));
            needed
        }
    };
    let mut missing = Vec::new();
    for (right, table) in needed {
        if !sqlx::query_scalar::<_, bool>(MAY_TABLE)
            .bind(&table)
            .bind(right)
            .fetch_one(&mut *conn)
            .await?
        {
            missing.push(format!("{right} on {table}"));
        }
    }
    if role == Role::Relay
        && !sqlx::query_scalar::<_, bool>(MAY_SEQUENCE)
            .bind(names.outbox(d))
            .fetch_one(conn)
            .await?
    {
        missing.push(format!("SELECT on the sequence of {}", names.outbox(d)));
    }
    Ok(missing)
}

async fn mark(conn: &mut PgConnection, names: &Names) -> Result<Option<Mark>, sqlx::Error> {
    let sql = format!(
        "SELECT source_id, source, epoch, owner, renewal, position, seq, cluster_id,
                extract(epoch FROM clock_timestamp() - updated_at)::float8 AS age_seconds FROM {}",
        names.mark(Dialect::Postgres)
    );
    let row = sqlx::query(AssertSqlSafe(sql)).fetch_optional(conn).await?;
    row.map(|row| {
        Ok(Mark {
            source_id: row.try_get("source_id")?,
            source: row.try_get("source")?,
            epoch: row.try_get("epoch")?,
            owner: row.try_get("owner")?,
            renewal: row.try_get("renewal")?,
            position: row.try_get("position")?,
            seq: row.try_get("seq")?,
            cluster_id: row.try_get("cluster_id")?,
            age_seconds: row.try_get("age_seconds")?,
        })
    })
    .transpose()
}

async fn topics(
    conn: &mut PgConnection,
    names: &Names,
    high: i64,
) -> Result<std::collections::BTreeSet<String>, sqlx::Error> {
    let table = names.outbox(Dialect::Postgres);
    let sql = format!(
        "SELECT topic FROM (SELECT topic FROM {table} WHERE id > $1 ORDER BY id LIMIT $2) waiting
         UNION SELECT topic FROM (SELECT topic FROM {table} ORDER BY id DESC LIMIT $2) newest"
    );
    let topics: Vec<String> = sqlx::query_scalar(AssertSqlSafe(sql))
        .bind(high)
        .bind(ROWS_FOR_TOPICS)
        .fetch_all(conn)
        .await?;
    Ok(topics.into_iter().collect())
}
